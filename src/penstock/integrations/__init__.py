"""Glue for web frameworks: ``penstock.integrations.fastapi``, ``.django`` and ``.flask``.

Each module imports its framework; this package and the rest of Penstock import none.
"""
