"""What the pages of several lessons use: meters, a tap on the wire, timelines, curves, one set of colours."""
