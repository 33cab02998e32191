"""Where weights come from: files of several formats, all read by the names of the decoder."""
