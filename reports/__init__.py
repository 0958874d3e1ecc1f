"""Reports: pure functions from tables to HTML, Markdown, text and JSON."""
