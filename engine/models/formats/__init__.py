"""Weight file formats, all read by the decoder's tensor names."""
