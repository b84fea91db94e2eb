"""What these tests save is generated, however fast torch's operators are on the machine that runs them."""

from tests.generated import always_generated

__all__ = ["always_generated"]
