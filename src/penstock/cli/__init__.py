"""The command line: ``penstock``. A module per command or family, imported when that is called.

::

    main        the script: runs a command, turns errors into one line and an exit code
    commands    the table of commands, and the group that imports them when they are called
    parameters  options that many commands have, and how help shows them
    values      how the texts of options become values
    completing  what a shell completes from the store
    settings    values by flag, environment, saved, project file, default
    connect     from settings to an app, and to the job an id means
    output      tables, JSON and plain text
    errors      exit codes, and what is said of an error
"""
