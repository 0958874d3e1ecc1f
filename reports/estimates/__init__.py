"""Estimates for people: each result as a page, and a page as text, Markdown, HTML or JSON."""

from __future__ import annotations
