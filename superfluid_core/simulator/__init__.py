"""The real scheduler in virtual time: scenarios, costs, runs, reports, plots, traces, fleets."""
