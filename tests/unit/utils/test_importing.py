"""Imports without garbage collections."""

import gc

import pytest

from recipe.atropos.utils.importing import gc_disabled


def test_importing_collects_no_garbage_and_restores_the_state():
    with gc_disabled():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), gc_disabled():
        raise ImportError("on purpose")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_importing_leaves_nothing_to_look_through_later():
    with gc_disabled():
        kept = [[] for _ in range(1000)]
    try:
        assert gc.get_freeze_count() >= len(kept)
    finally:
        gc.unfreeze()
