"""A residual network on random images: channels last, half precision with a scaler, SGD with momentum, accuracy."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--image", type=int, default=224)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


def conv(inputs, outputs, kernel, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.one, self.two = conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride)

    def forward(self, x):
        return self.relu(self.two(self.relu(self.one(x))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        w = args.width
        self.stem = nn.Sequential(conv(3, w, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        widths = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1)]
        widths += [(2 * w, 4 * w, 2), (4 * w, 4 * w, 1), (4 * w, 8 * w, 2), (8 * w, 8 * w, 1)]
        self.blocks = nn.Sequential(*[Block(*each) for each in widths])
        self.head = nn.Linear(8 * w, args.classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return args.steps * args.batch_size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, args.image, args.image, generator=generator), index % args.classes


torch.manual_seed(0)
model = ResNet().cuda().to(memory_format=torch.channels_last)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cuda")
loader = torch.utils.data.DataLoader(Images(), args.batch_size, shuffle=True, pin_memory=True)

correct = seen = 0
for images, labels in loader:
    images = images.to("cuda", non_blocking=True, memory_format=torch.channels_last)
    labels = labels.to("cuda", non_blocking=True)
    with torch.autocast("cuda", torch.float16):
        output = model(images)
        loss = criterion(output, labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    correct += (output.argmax(1) == labels).sum().item()
    seen += len(labels)
    scheduler.step()
    print(f"loss {loss.item():.4f}  accuracy {correct / seen:.3f}  scale {scaler.get_scale():.0f}")
