"""A project of Django, which the tests run in processes of their own."""
