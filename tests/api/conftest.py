import pytest


@pytest.fixture(autouse=True, scope="session")
def _measurements_aside(tmp_path_factory):
    """What is measured here is kept apart from what the machine's user has measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("measured")))
        yield
