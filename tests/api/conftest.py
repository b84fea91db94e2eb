import pytest


@pytest.fixture(autouse=True, scope="session")
def _measurements_aside(tmp_path_factory):
    """What is measured and built here is kept apart from what the machine's user has; the workers of one run share it."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str((folder.parent if folder.name.startswith("popen-") else folder) / "measured"))
        yield
