"""The application that ``INSTALLED_APPS`` names."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from penstock.core.text import get_logger
from penstock.integrations.django.configuration import get_app, problems

logger = get_logger("penstock.integrations")


class PenstockConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Checks the settings, and sets up the app that they name."""

    name = "penstock.integrations.django"
    label = "penstock"
    verbose_name = "Penstock"

    def ready(self) -> None:
        """Register the checks, and move the app of the settings to their store, before other code uses it."""
        checks.register(check_settings, "penstock")
        try:
            get_app()
        except ImproperlyConfigured as error:
            # `manage.py check` shows all problems; a web server only logs.
            logger.error("Penstock is not set up: %s", error)  # noqa: TRY400


def check_settings(app_configs: object = None, **options: object) -> list[checks.CheckMessage]:
    """Return the problems of the setting ``PENSTOCK``."""
    return [
        checks.Error(problem.message, hint=problem.remedy, id=f"penstock.{problem.id}")
        for problem in problems()
    ]
