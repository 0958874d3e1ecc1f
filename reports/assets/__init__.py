"""Files of the HTML report: template, style, scripts."""
