"""What ranks exchange in a plan: once its order is known, links work beside it."""
