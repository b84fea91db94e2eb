"""Which operators belong together, by AGO's own method."""
