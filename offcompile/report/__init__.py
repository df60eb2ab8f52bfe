"""Reports on compiled graphs for users: text, JSON, a web page, pictures, traces, logs.

In: a problem, its plan, and measured steps. Out: `PlanReport` (`report`), based on the record of a
graph (`record`), the treatment of each tensor and module (`explain`, `modes`), the waits of compute
(`stalls`), the page for a browser (`page`), drawings (`dot`, `svg`), dumps and trace events.
"""
