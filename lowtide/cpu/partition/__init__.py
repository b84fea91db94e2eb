"""Which operators belong together (AGO, section IV), and which may share a kernel without repeated work (section III). No torch."""
