"""The management commands of Django."""
