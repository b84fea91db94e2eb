"""Sets of nodes into loops over parts of one of their dimensions (fission: MAGIS, section 4)."""
