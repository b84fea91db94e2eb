"""The nouns of the house, their text and their checks. No torch."""
