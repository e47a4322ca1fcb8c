"""The command line, ``penstock``. Each command or family has a module, which is imported when it is called.

::

    main        the script: runs a command, turns errors into one line and an exit code
    commands    the table of commands, and the group that imports them
    parameters  options that many commands share, and the layout of help
    values      parsers of option values
    completion  the queues and ids that a shell completes

    settings    values by flag, environment, saved file, project file, default
    connect     from settings to an app
    jobview     from an id to a job, and the views of a job
    output      tables, JSON and plain text
    errors      exit codes and error messages
"""
