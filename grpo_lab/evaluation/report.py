def evaluate_run(*a): raise NotImplementedError
def draw_run(run): return []
def evaluation_table(run): return []
