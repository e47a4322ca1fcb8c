"""The app of a Flask application, for the command line and for processes of workers: importing it loads both.

It is the current application, or the one that ``FLASK_APP`` names, as the command ``flask`` finds it.
"""

from __future__ import annotations

import os

from flask import current_app, has_app_context
from flask.cli import ScriptInfo

from penstock.core.text import shown
from penstock.errors import InvalidOption
from penstock.integrations.flask import Penstock

_web = current_app if has_app_context() else ScriptInfo(os.environ.get("FLASK_APP")).load_app()
if not isinstance(_web.extensions.get("penstock"), Penstock):
    raise InvalidOption(
        f"the Flask application {shown(_web.name)} has no Penstock: call Penstock().init_app(app)."
    )

app: Penstock = _web.extensions["penstock"]
app.load()
