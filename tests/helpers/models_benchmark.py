"""benchmarks/models.py as a module; its folder has files of names that other packages have too."""

import importlib.util

from helpers import ROOT

_spec = importlib.util.spec_from_file_location("models_benchmark", ROOT / "benchmarks" / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)
