"""Four short reports that the examples read: made up, with plain facts to ask about."""

from __future__ import annotations

REPORTS = {
    "port": """\
Report of the port project. Its two new cranes arrived in February, eleven weeks late, because the ferry that carried them had \
to wait for calm weather. Each crane lifts forty tonnes and needs a driver and a signaller. Six drivers were trained in March at \
a cost of 286,000 crowns. The old crane will be sold to a shipyard in Bergen for 310,000 crowns. In the first quarter 412 ships \
called at the port, 38 more than a year before; the longest was a car carrier of 199 metres. A storm on the ninth of January \
damaged the northern quay over a length of sixty metres. The repair takes until August and costs 7.4 million crowns, of which \
the insurance pays five. Until then ships of more than 150 metres have to use the southern quay. The harbour master, Jonas \
Lunde, asks for a second pilot boat, because the present one is in repair one week of six.""",
    "museum": """\
Report of the museum. It had 48,200 visitors last year, a tenth more than the year before, most of them in July. A ticket costs \
140 crowns, and children under twelve pay nothing. The new wing for polar exploration opens on the first of June with the sledge \
of the 1911 expedition, two tents and the diaries of the cook. Its heating failed twice in January and was repaired by the \
supplier at no cost. A leak in the roof of the old wing was found in March; the slates above the library are a hundred and four \
years old and shall be replaced for 1.9 million crowns. The director, Ingrid Solheim, asks for one more guide who speaks \
Spanish, since two cruise lines from Valencia will call from May on. The shop sold 3,100 copies of the catalogue, and a second \
edition is being printed in Tallinn.""",
    "railway": """\
Report of the railway. The line over the mountains was closed for nine days in March after an avalanche near Finse; no one was \
hurt, but a freight train with salmon had to turn back. Snow fences of 1.2 kilometres are to be built before the winter, at a \
price of 4.5 million crowns, and a decision has to be made at the review. Trains were on time on 91 days of a hundred, three \
more than last year. The night train to the capital carried 61,000 passengers and was full on every Friday. Two of its nine \
sleeping cars are from 1986 and will be replaced next year. The signal box at the junction was moved into a container after a \
fire in its kitchen. Line manager Siv Haugen proposes a passing loop at kilometre 112, which would shorten the journey by \
eleven minutes and cost 38 million crowns.""",
    "hospital": """\
Report of the hospital. It treated 9,340 patients in the first quarter, 210 of them after accidents on ice. The waiting time for \
a new hip fell from fourteen to nine weeks since a third operating theatre was opened in January. The helicopter flew 187 \
missions; on twelve days fog kept it on the ground, and boats took its place. A new scanner was bought for 11.2 million crowns \
and is used from six in the morning until ten at night. Thirty-one nurses were hired and nineteen left, most of them because \
flats near the hospital are dear; the municipality offers twelve flats from September on. The kitchen now cooks for the school \
as well, 640 meals a day. Head physician Marit Eide asks for a decision on the emergency generator, which is thirty years old \
and failed in two of five tests.""",
}

ALL = "\n\n".join(REPORTS.values())
