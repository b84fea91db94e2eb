"""Networks on small devices: a graph from an ONNX file, kilobytes in several memories, and a plan that is run before it is believed."""
