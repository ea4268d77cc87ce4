"""The fastest stack that fits a card and the machine around it, and why it is not faster."""

# %%
from hybridtrain import FitRequest, find_card, model_preset, recommend
from hybridtrain.virtual_gpu import Host

request = FitRequest(
    model=model_preset("gpt2-small"),
    card=find_card("rtx-4090"),
    host=Host(memory_gib=32),
    seq_len=128,
    num_sequences=2,
)
answer = recommend(request, on_try=lambda name: print("tried", name))

# %% The stack is a list of optimizations like any other.
for optimization in answer.chosen.optimizations():
    print(optimization)
print(f"{answer.option.tokens_per_s:,.0f} tokens/s, {answer.option.bound} binds (estimated)")
