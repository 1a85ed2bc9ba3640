"""`help` of everything in the package can be shown."""

import importlib
import pkgutil
import pydoc

import pytest

import spool

MODULES = ["spool", *(found.name for found in pkgutil.walk_packages(spool.__path__, "spool."))]


def test_the_whole_package_is_walked():
    assert {"spool.engines.step", "spool.importers.base", "spool.rollout.plan", "spool.cli.import_"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_help_of_every_module_can_be_shown(name):
    assert name in pydoc.render_doc(importlib.import_module(name))


@pytest.mark.parametrize("thing", ["engines.EngineStep", "engines.decode_routing", "importers.ImportedRun"])
def test_help_of_what_users_meet_first(thing):
    assert thing.rpartition(".")[2] in pydoc.render_doc(f"spool.{thing}")
