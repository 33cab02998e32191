"""The endpoints: a folder each, over what all of them share."""
