"""Are the parts of this package what a run takes them for? One error names everything that is wrong
with a part.
"""

import esper_soa

esper_soa.check_blueprint("my_parts.seeds:twin")
esper_soa.check_blueprint("my_parts.seeds:mixer", channels=(8, 16, 32))
esper_soa.check_host("my_parts.hosts:funnel")
esper_soa.check_host("my_parts.hosts:residual")
esper_soa.check_reward("my_parts.rewards:thrifty")
esper_soa.check_agent("my_parts.agents:patient", steps=24)
print("my_parts: all is well")
