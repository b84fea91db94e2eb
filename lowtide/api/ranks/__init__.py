"""Steps that several processes run together."""
