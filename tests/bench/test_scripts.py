"""All scripts of the bench can be imported: what they take from the package and from one another is there."""

import importlib
import pkgutil

import bench


def test_that_every_module_of_the_bench_can_be_imported():
    names = [module.name for module in pkgutil.walk_packages(bench.__path__, "bench.")]
    assert {"bench.picture", "bench.coverage.trial", "bench.torch_db.workers"} <= set(names)
    for name in names:
        importlib.import_module(name)
