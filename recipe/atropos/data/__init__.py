"""From scored groups to tensors: rows, verl's ``DataProto``, sampling parameters, and recorded batches for replay."""
