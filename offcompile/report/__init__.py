"""Reports of compiled graphs, as people see them: text, JSON, a page, pictures, traces, logs.

In: a problem, its plan, and measured steps. Out: `PlanReport` (`report`) on the record of a graph
(`record`), what became of each tensor and module (`explain`, `modes`), what compute waited for
(`stalls`), the page for a browser (`page`), drawings (`dot`, `svg`), dumps and trace events.
"""
