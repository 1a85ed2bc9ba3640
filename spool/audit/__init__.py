"""What is on disk against what was recorded: `verify`, and where the bytes are: `usage`."""

from spool.audit.cold import ColdPacks
from spool.audit.report import Finding, Report
from spool.audit.units import NamedUnits
from spool.audit.usage import usage
from spool.audit.verify import Recorded, verify

__all__ = ["ColdPacks", "Finding", "NamedUnits", "Recorded", "Report", "usage", "verify"]
