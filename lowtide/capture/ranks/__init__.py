"""Training by several processes: what DistributedDataParallel does around a step, as operators of the graph."""
