"""What a checkpoint of many files is made of: names, manifest, layout. Torch-free."""
