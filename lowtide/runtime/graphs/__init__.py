"""Steps as CUDA graphs: what can be captured, the device that captures, and the bookkeeping around replays."""
