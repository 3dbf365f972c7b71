"""Programs that bwd runs as killable children. They report on standard output, one JSON object a line
(`bwd.children.report`), and import nothing of bwd but `bwd.core`."""
