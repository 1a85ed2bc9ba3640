"""Commit logs and sealed records on disk, composed with the catalog that indexes them."""

from spool.logs.feeder import LogFeeder, Problem
from spool.logs.room import Room
from spool.logs.timer import FeedTimer

__all__ = ["FeedTimer", "LogFeeder", "Problem", "Room"]
