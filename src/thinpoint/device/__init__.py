"""The codec on an accelerator: state is encoded and decoded where it lives. The only room with GPU code."""
