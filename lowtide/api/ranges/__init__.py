"""Steps for a range of shapes: what users say of it, and what is captured and planned for it."""
