"""Random kills: of ranks and of the controller over a long run; and the processes that a killed controller leaves."""
