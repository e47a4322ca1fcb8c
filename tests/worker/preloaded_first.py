"""Imported by processes before the module of their task."""
