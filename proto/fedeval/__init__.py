"""The wire: `fedeval.v1` is generated, `fedeval.wire` translates it to and from plain data classes."""
