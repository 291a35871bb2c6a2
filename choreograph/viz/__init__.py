"""Message graph, schema layout and step graph as SVG."""
