"""Detailed tables of an attribution, one module for each subject."""
