"""The command line: typer for the arguments, rich for what it shows."""
