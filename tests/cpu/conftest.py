"""What these tests look at is generated, however fast it is on the machine that runs them."""

from tests.generated import always_generated

__all__ = ["always_generated"]
