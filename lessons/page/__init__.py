"""What the pages of several lessons use: a tap on the wire, timelines, curves, and one set of colours."""
