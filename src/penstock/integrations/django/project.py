"""The app of a Django project, for the command line and for processes of workers: importing it sets Django up.

``penstock worker penstock.integrations.django.project:app`` needs the variable ``DJANGO_SETTINGS_MODULE``.
"""

from __future__ import annotations

import django
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import module_has_submodule

from penstock.integrations.django.configuration import get_app

if not apps.ready:
    django.setup()
if not apps.is_installed("penstock.integrations.django"):
    raise ImproperlyConfigured('INSTALLED_APPS does not have "penstock.integrations.django". Add it.')

app = get_app()
app.load(
    *(
        f"{config.name}.tasks"
        for config in apps.get_app_configs()
        if config.module is not None and module_has_submodule(config.module, "tasks")
    )
)
if django.VERSION >= (6, 0):
    from penstock.integrations.django.backend import serve_backends

    serve_backends(app)
