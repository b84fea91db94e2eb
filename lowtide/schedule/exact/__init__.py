"""Orders proven to have the least peak, or a gap that is proven."""
