"""`python -m fusion_passes`: the command line."""

import sys

try:
    from fusion_passes.cli.app import app
except ImportError as error:
    sys.exit(f"the command line needs {error.name}: pip install 'fusion-passes[cli]'")

app()
