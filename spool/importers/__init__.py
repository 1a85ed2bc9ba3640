"""Recorded runs of other tools -> sessions of a spool.

::

    report = spool.importers.import_runs("runs/", sp)

`read_runs` parses without recording. The form is found by content, file by file: see `FORMS`.
"""

from spool.importers.base import Failure, Ignored, ImportedRun, ImportedStep, ordered_steps
from spool.importers.detect import FORMS
from spool.importers.files import read_runs
from spool.importers.record import ImportReport, import_runs

__all__ = [
    "FORMS",
    "Failure",
    "Ignored",
    "ImportReport",
    "ImportedRun",
    "ImportedStep",
    "import_runs",
    "ordered_steps",
    "read_runs",
]
